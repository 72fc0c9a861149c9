"""The store on MySQL, MariaDB and TiDB."""

from duetime.stores.store_url import require_driver

require_driver("asyncmy", "MySQL", extra="mysql")
