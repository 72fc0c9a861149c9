"""The store on Amazon DynamoDB."""
