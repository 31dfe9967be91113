"""The search team: a router that decides who acts next, a searcher, and an answerer."""
