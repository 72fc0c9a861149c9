"""The store on Oracle Database."""
