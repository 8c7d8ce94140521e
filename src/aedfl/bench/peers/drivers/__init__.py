"""One small script per simulator. They are run, not imported: each in the environment of the one that it drives."""
