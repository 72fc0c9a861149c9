"""HTTP/1.1 as the service needs it: the server, the client, URLs and listening sockets."""
