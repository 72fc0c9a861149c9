"""The one way in for every interface: routing to the owner of a shard, commands, namespaces, status."""
