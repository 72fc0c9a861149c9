"""The entry point of every interface: routing to the owner of a shard, commands, namespaces, status."""
