package ect_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// A key is made, its public part is trusted, and a token goes from one side to the
// other.
func Example() {
	ring, err := ect.GenerateRing(ect.ES256)
	if err != nil {
		panic(err)
	}
	issuer, err := ect.NewIssuer("spiffe://example.com/agent/a", ring)
	if err != nil {
		panic(err)
	}
	token, err := issuer.Issue(time.Now(), ect.Claims{
		Audience: []string{"spiffe://example.com/gateway"}, Action: "create_payment",
		Workflow: "a0b1c2d3-e4f5-6789-abcd-ef0123456789", Input: ect.Sum([]byte(`{"amount":100}`)),
	})
	if err != nil {
		panic(err)
	}

	published, err := ring.PublicSet(time.Now(), issuer.Identity())
	if err != nil {
		panic(err)
	}
	keys, err := ect.ParseSet(published, ect.Owner{}) // the keys name their owner
	if err != nil {
		panic(err)
	}
	verifier, err := ect.NewVerifier(ect.Policy{Audience: []string{"spiffe://example.com/gateway"}, Sources: []ect.Source{keys}})
	if err != nil {
		panic(err)
	}
	read, err := verifier.Verify(context.Background(), token.Raw(), ect.Presentation{Now: time.Now()})
	if err != nil {
		panic(err)
	}
	fmt.Println(read.Issuer(), read.Action(), read.Level())

	_, err = verifier.Verify(context.Background(), token.Raw(), ect.Presentation{Now: time.Now().Add(time.Hour)})
	var refused *ect.Error
	if errors.As(err, &refused) {
		fmt.Println(refused.Status(), refused.Code)
	}
	// Output:
	// spiffe://example.com/agent/a create_payment L2
	// 403 expired
}

// A draft settles the id, so that it can be kept with what it describes; the signature
// comes later.
func ExampleIssuer_Sign() {
	ring, err := ect.GenerateRing(ect.EdDSA)
	if err != nil {
		panic(err)
	}
	issuer, err := ect.NewIssuer("spiffe://example.com/gateway", ring)
	if err != nil {
		panic(err)
	}
	draft, err := issuer.Draft(time.Now(), ect.Claims{
		Audience: []string{"spiffe://example.com/gateway"}, Action: string(ect.EventCheckpoint),
		Ext: new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Int(ect.MemberTTL, 86400),
	})
	if err != nil {
		panic(err)
	}
	kept := draft.Payload()

	later, err := ect.ParseDraft(kept)
	if err != nil {
		panic(err)
	}
	token, err := issuer.Sign(later)
	if err != nil {
		panic(err)
	}
	fmt.Println(token.ID() == draft.ID(), token.Payload() == kept, token.Ext().JSON())
	// Output: true true {"cascade.reversible":true,"cascade.ttl":86400}
}

// The same event has a name in each vocabulary.
func ExampleVocabulary_Event() {
	event, _ := ect.ParseEvent("atd:rollback_result")
	for _, v := range []ect.Vocabulary{ect.Cascade, ect.ATD, ect.AERR} {
		fmt.Println(v, v.Event(event), v.Member(ect.MemberStatus))
	}
	// Output:
	// cascade rollback_complete cascade.status
	// atd atd:rollback_result atd.status
	// aerr aerr:rollback_complete aerr.status
}

// Tokens come in one or several field lines.
func ExampleParseFields() {
	tokens, err := ect.ParseFields([]string{"eyJ.e30.c2ln, eyJ.e30.c2lo", "eyJ.e30.c2lp"})
	fmt.Println(len(tokens), err)
	// Output: 3 <nil>
}
