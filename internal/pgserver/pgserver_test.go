//go:build unix

package pgserver

import "testing"

// What psql says beside an answer, such as that the server has ended meanwhile, is no part of it.
func TestAnswersAreApartFromMessages(t *testing.T) {
	s := Test(t)
	if s == nil {
		return
	}
	got, err := s.SQL("do $$ begin raise warning 'beside'; end $$; select 42")
	if err != nil || got != "42" {
		t.Errorf("%q, %v", got, err)
	}
}
