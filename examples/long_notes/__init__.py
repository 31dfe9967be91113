"""Long notes: an agent whose window holds one page reads several, and learns what a summary must carry over."""
