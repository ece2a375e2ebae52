package api

type (
	// PreparedDocument is the answer to a request to prepare a rollback.
	PreparedDocument = preparedDocument
	// ReleasedDocument is the answer to a release.
	ReleasedDocument = releasedDocument
)
