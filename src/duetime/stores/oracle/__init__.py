"""The store on Oracle Database."""

from duetime.stores.store_url import require_driver

require_driver("oracledb", "Oracle", extra="oracle")
