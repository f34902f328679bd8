"""A report for people and for machines: text, JUnit, GitHub annotations, HTML."""
