"""What a confidence means: fitted to development data, measured on test data."""
