"""POST /invocations, Amazon SageMaker's one path for all APIs. Public: `routes.router`."""
