"""Model configurations, architectures and forwards."""
