"""The store on Microsoft SQL Server."""

from duetime.stores.store_url import require_driver

require_driver("mssql_python", "SQL Server", extra="sqlserver")
