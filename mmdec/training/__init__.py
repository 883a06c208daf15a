"""LightningModules and DataModules, one file a system. Nothing here is needed to run a trained model."""
