"""What `report` and `compare` are made of: rows that were measured, findings, pictures, a page."""
