// Package attach probes an engine that dpserve did not start: its family, models and version.
package attach

import (
	"context"
	"errors"
	"net/http"

	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/problem"
)

// Families of attached engines. OpenAI assumes nothing but the API.
const (
	VLLM   = "vllm"
	SGLang = "sglang"
	OpenAI = "openai"
)

// Found is the result of a probe.
type Found struct {
	URL         string
	Family      string   // vllm | sglang | openai
	Models      []string // base models first, as the engine lists them
	Version     string   // "" = not told
	MaxModelLen int      // of the first model; 0 = not told
}

// Probe asks the engine at url for its models and version; the deadline is ctx's. Errors are
// problem.Unavailable with a hint for the person who typed the URL. rt nil means a transport of its own.
func Probe(ctx context.Context, url string, rt http.RoundTripper) (Found, error) {
	if rt == nil {
		t := engine.NewTransport()
		defer t.CloseIdleConnections()
		rt = t
	}
	c := engine.NewClient(url, engine.Addressing{}, "", rt)
	models, err := c.Models(ctx)
	if err != nil {
		return Found{}, explain(url, err)
	}
	f := Found{URL: url, MaxModelLen: models[0].MaxModelLen}
	f.Models = ids(models)
	f.Version, _ = c.Version(ctx) // not every engine has the route
	f.Family = family(models[0].OwnedBy, f.Version)
	return f, nil
}

// ids lists base models before their adapters.
func ids(models []engine.Model) []string {
	var base, adapters []string
	for _, m := range models {
		if m.Parent == "" {
			base = append(base, m.ID)
		} else {
			adapters = append(adapters, m.ID)
		}
	}
	return append(base, adapters...)
}

// family goes by owned_by; SGLang has no /version, other front ends of vLLM keep its route.
func family(ownedBy, version string) string {
	switch {
	case ownedBy == VLLM, ownedBy == SGLang:
		return ownedBy
	case version != "":
		return VLLM
	}
	return OpenAI
}

func explain(url string, err error) error {
	var status *engine.StatusError
	switch {
	case engine.IsRefused(err):
		return problem.New(problem.Unavailable, "nothing listens at %s: %w", url, err).
			WithHint("start the engine there, or check host and port")
	case errors.Is(err, context.DeadlineExceeded):
		return problem.New(problem.Unavailable, "%s does not answer: %w", url, err).
			WithHint("try: curl %s/v1/models", url)
	case errors.As(err, &status) && status.Status == http.StatusUnauthorized:
		return problem.New(problem.Unavailable,
			"%s asks for an API key, which dpserve cannot send in this version", url).
			WithHint("start the engine without --api-key on an address that only this machine reaches")
	case errors.As(err, &status):
		return problem.New(problem.Unavailable, "%s is no OpenAI-compatible engine: %w", url, err).
			WithHint("the URL is scheme://host:port without a path; try: curl %s/v1/models", url)
	}
	return problem.New(problem.Unavailable, "cannot probe %s: %w", url, err).
		WithHint("try: curl %s/v1/models", url)
}
