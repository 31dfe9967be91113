"""The store assistant: a router and seven helpers, two of which get three quarters of the calls."""
