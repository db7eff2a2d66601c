"""Storage that outlives requests: objects in SQLite, contents of files beside it, in one data folder.

Public: `store.Store` and `store.store_of`, `objects.ObjectTable`, `schema.Schema`, `contents.Contents`,
`locks.ProcessLocks`, `folder.data_folder`, `errors.StoreUnavailableError`, `errors.StoreFullError`.
"""
