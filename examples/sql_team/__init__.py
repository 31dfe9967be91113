"""The SQL team: a writer that queries a database, and a checker that sends queries back."""
