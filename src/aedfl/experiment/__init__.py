"""Runs: what they are made from, how they are carried out, and what they leave behind."""
