"""Local training: one plan, several back ends. `sequential` is the oracle, `batched` trains many models at once."""
