"""Speed, measured against others in one run."""
