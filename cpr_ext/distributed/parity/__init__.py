"""Parity of the table shards in peers' memory, from which a lost shard is rebuilt bit for bit."""
