"""What a run says about itself. In: events and decisions with their reasons. Out: journal, curve, table, screen."""
