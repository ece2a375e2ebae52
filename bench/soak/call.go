package soak

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/bench/upstream"
)

// outcome is what an attempt says of its call.
type outcome uint8

const (
	lost   outcome = iota // no whole answer, or one that asks to come again
	ran                   // it was executed; the answer is of this execution
	doubt                 // nobody knows
	absurd                // an answer that must not be
)

// attempt is one attempt of a call that has ended.
type attempt struct {
	outcome  outcome
	effect   int
	replayed bool
	text     string // of an absurd answer
}

// try makes one attempt. The client sends nothing twice by itself.
func try(ctx context.Context, client *http.Client, addr, id string) attempt {
	ctx, cancel := context.WithTimeout(ctx, attemptBound)
	defer cancel()
	body := fmt.Sprintf(`{"amount":1999,"for":%q}`, id)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/v1/charges", strings.NewReader(body))
	if err != nil {
		return attempt{outcome: absurd, text: err.Error()}
	}
	req.GetBody = nil // with it and a key, net/http sends a request again
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", id)
	res, err := client.Do(req)
	if err != nil {
		return attempt{}
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		return attempt{} // whoever has not seen the end knows nothing
	}
	return judge(res, text)
}

func judge(res *http.Response, body []byte) attempt {
	status := res.Header.Get("Execution-Status")
	if res.StatusCode == http.StatusOK && status != "" && status != "refused" {
		effect, err := strconv.Atoi(res.Header.Get(upstream.EffectHeader))
		if err != nil || string(body) != upstream.Body {
			return attempt{outcome: absurd, text: fmt.Sprintf("%s with %d bytes and the execution %q", status, len(body), res.Header.Get(upstream.EffectHeader))}
		}
		return attempt{outcome: ran, effect: effect, replayed: status == "replayed"}
	}
	var problem struct {
		Type string `json:"type"`
	}
	if json.Unmarshal(body, &problem) == nil {
		switch problem.Type[strings.LastIndexByte(problem.Type, '/')+1:] {
		case "in-doubt":
			return attempt{outcome: doubt}
		case "in-progress", "shutting-down", "store-unavailable":
			return attempt{}
		}
	}
	return attempt{outcome: absurd, text: fmt.Sprintf("%d %s %.200s", res.StatusCode, status, body)}
}
