"""The adapters of store.py, one file for each database. `duetime.store.open_store` picks by URL scheme."""
