"""Long runs that show what rz claims."""
