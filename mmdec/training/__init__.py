"""Training: one folder for each type of model or drafter, and modules that all these folders share.

The code that uses a trained model does not import this package.
"""
