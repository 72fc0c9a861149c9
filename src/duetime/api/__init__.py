"""HTTP in front of the service: requests in, answers out, who may ask, and the documents that describe it."""
