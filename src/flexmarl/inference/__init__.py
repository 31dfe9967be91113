"""Tokens in, tokens out. In: generation requests and published weights. Out: generations, in completion order."""
