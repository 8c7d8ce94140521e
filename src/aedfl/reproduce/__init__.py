"""The paper's tables and figures: which runs they need, their records, tuning, and how they are written out."""
