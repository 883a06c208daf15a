"""Calibration of confidences: fitted to development data, measured on test data."""
