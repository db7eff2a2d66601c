"""/v1/files: upload, list, get, content, delete. Public: `routes.router`, `files.Files`, `files.files_of`."""
