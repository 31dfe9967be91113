"""Serves tokens from live engines. In: generation requests and published weights. Out: generations, as they end."""
