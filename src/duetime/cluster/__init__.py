"""Several instances on one database: membership, placement of shards, and commands sent to another instance."""
