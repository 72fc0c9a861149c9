"""The store on Microsoft SQL Server."""
