"""What a person looks at: tables and pictures of runs."""
