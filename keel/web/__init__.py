"""What every HTTP server of Keel shares: who is answered, how often, and how a server describes itself."""
