"""What several small examples share."""
