"""The engines of the served models: which are loaded, which make room for others, and which are in use.

The first app process keeps the engine processes, in an `EnginePool`. Every app process, that one included, has
`Engines`: a client of each engine and a link to the pool, through which it holds a model while requests use it.

Public: `pool.EnginePool`, `engines.Engines`, `engines.Engine`, `messages`.
"""
