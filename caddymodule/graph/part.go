package graph

import "context"

// TakesPart reports whether an entry of a workflow is linked to the reader's own part in
// it: what reading the workflow would show of it (ADR 0024).
func (s *Server) TakesPart(ctx context.Context, wid, id string, who Reader) (bool, error) {
	if called, err := s.hasCalled(ctx, who); err != nil || !called {
		return false, err
	}
	part, err := s.shareOf(ctx, wid, who)
	return part.has(id), err
}
