"""One idea each. A section says what it measures, measures it, and says how its figures are shown."""
