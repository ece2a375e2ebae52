package rollbackapi

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// result is a rollback's result in the words of an older draft: what its token says, and
// the token (ATD "Basic Rollback", AERR "Rollback Response"). Its members are an API.
type result struct {
	Action  string          `json:"exec_act"`
	ID      string          `json:"jti"`
	Parents []string        `json:"par"`
	OutHash string          `json:"out_hash,omitempty"`
	Ext     json.RawMessage `json:"ext"`
	ECT     string          `json:"ect"`
}

// answerIn answers with a finished rollback in the words of an older draft.
func (q *question) answerIn(ctx context.Context, r *rollback.Rollback, id string, v ect.Vocabulary, request string) error {
	raw, err := q.Tokens.Result(ctx, r, request, v)
	if err != nil {
		if q.r.Context().Err() == nil {
			q.Logger.Warn("the result of a rollback cannot be told in the words that were asked for",
				slog.String("rollback", id), slog.String("vocabulary", v.String()), slog.Any("error", err))
		}
		return err
	}
	token, err := ect.ParseInsecure(raw) // signed a moment ago
	if err != nil {
		return err
	}
	doc := result{
		Action: token.Action(), ID: token.ID(), Parents: token.Parents(), OutHash: token.OutputHash().String(),
		Ext: json.RawMessage(token.Ext().JSON()), ECT: raw,
	}
	if token.OutputHash().IsZero() {
		doc.OutHash = ""
	}
	q.w.Header().Set(ect.FieldName, raw)
	return q.writeJSON(http.StatusOK, doc)
}
