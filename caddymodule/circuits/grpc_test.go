package circuits_test

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
)

// Each status of gRPC has one of HTTP, by which `failure` judges it.
func TestGRPCStatus(t *testing.T) {
	for text, want := range map[string]string{
		"0":  "200 grpc-status 0 (OK)",
		"1":  "499 grpc-status 1 (CANCELLED)",
		"2":  "500 grpc-status 2 (UNKNOWN)",
		"3":  "400 grpc-status 3 (INVALID_ARGUMENT)",
		"4":  "504 grpc-status 4 (DEADLINE_EXCEEDED)",
		"5":  "404 grpc-status 5 (NOT_FOUND)",
		"6":  "409 grpc-status 6 (ALREADY_EXISTS)",
		"7":  "403 grpc-status 7 (PERMISSION_DENIED)",
		"8":  "429 grpc-status 8 (RESOURCE_EXHAUSTED)",
		"9":  "400 grpc-status 9 (FAILED_PRECONDITION)",
		"10": "409 grpc-status 10 (ABORTED)",
		"11": "400 grpc-status 11 (OUT_OF_RANGE)",
		"12": "501 grpc-status 12 (UNIMPLEMENTED)",
		"13": "500 grpc-status 13 (INTERNAL)",
		"14": "503 grpc-status 14 (UNAVAILABLE)",
		"15": "500 grpc-status 15 (DATA_LOSS)",
		"16": "401 grpc-status 16 (UNAUTHENTICATED)",
		"17": "500 grpc-status 17", "4294967295": "500 grpc-status 4294967295",
		"": "500 grpc-status 2 (UNKNOWN)", "x": "500 grpc-status 2 (UNKNOWN)", "-1": "500 grpc-status 2 (UNKNOWN)",
		"4294967296": "500 grpc-status 2 (UNKNOWN)",
	} {
		s, ok := circuits.GRPCStatus(http.Header{"Grpc-Status": {text}})
		if got := fmt.Sprint(s.HTTP(), " ", s); !ok || got != want {
			t.Errorf("%q: %s, %v; want %s", text, got, ok, want)
		}
	}
	if _, ok := circuits.GRPCStatus(http.Header{}); ok {
		t.Error("there is a status where there is none")
	}
}

// What gRPC is, is in the Content-Type alone.
func TestIsGRPC(t *testing.T) {
	for kind, want := range map[string]string{
		"application/grpc": "true false", "Application/GRPC+proto": "true false", "application/grpc; charset=utf-8": "true false",
		"application/grpc-web": "true true", "application/grpc-web-text+proto": "true true",
		"application/grpcish": "false false", "application/json": "false false", "": "false false",
	} {
		is, web := circuits.IsGRPC(http.Header{"Content-Type": {kind}})
		if got := fmt.Sprint(is, web); got != want {
			t.Errorf("%q: %s, want %s", kind, got, want)
		}
	}
}

// The time that callers of gRPC give.
func TestParseGRPCTimeout(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"5S": 5 * time.Second, "100m": 100 * time.Millisecond, "1u": time.Microsecond, "99999999n": 99999999, "2H": 2 * time.Hour, "3M": 3 * time.Minute,
		"": 0, "S": 0, "0S": 0, "5": 0, "5s": 0, "-1S": 0, "123456789S": 0, "99999999H": 0,
	} {
		if got, ok := circuits.ParseGRPCTimeout(text); got != want || ok != (want > 0) {
			t.Errorf("%q: %v, %v; want %v", text, got, ok, want)
		}
	}
}
