// Package webhook tells a receiver of escalations by a signed POST, as the Standard
// Webhooks specification has it (https://www.standardwebhooks.com/).
//
// The headers are `webhook-id`, the escalation's id, by which a receiver tells
// repetitions; `webhook-timestamp`, the seconds since 1970 at which this attempt was
// signed; and `webhook-signature`, for each secret `v1,` and the standard base64 of the
// HMAC-SHA256 of `id.timestamp.body`, with spaces in between. A receiver accepts one
// signature that fits, refuses timestamps that are more than a few minutes off, and
// answers 2xx once it has kept the message. The package's example is such a
// receiver.
//
// The body is JSON:
//
//	{
//	  "type": "escalation.opened",
//	  "timestamp": "2026-11-20T10:00:00Z",      when it was opened
//	  "data": {
//	    "id": "...",                            a UUID
//	    "gateway": "...",                       as configured; absent without
//	    "level": 2, "level_name": "approval",   1 pause, 2 approval, 3 stop
//	    "cause": "irreversible_rollback",       a word; new ones may come
//	    "summary": "...",                       a sentence for people
//	    "workflow": "...", "caller": "...",     absent where there is none
//	    "links": {                              each absent where there is none
//	      "checkpoint": "...", "rollback": "...", "error": "...",
//	      "execution": "...", "upstream": "..."
//	    }
//	  }
//	}
//
// New members may come; a receiver ignores what it does not know. The body of one
// escalation is the same in every attempt.
package webhook
