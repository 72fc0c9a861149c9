"""The store on PostgreSQL."""

from duetime.stores.store_url import require_driver

require_driver("asyncpg", "PostgreSQL", extra="postgres")
