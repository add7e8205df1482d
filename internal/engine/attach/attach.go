// Package attach probes an engine that dpserve did not start: its family, models and version.
package attach

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/kvevents"
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
	Models      []string // without adapters, as the engine lists them
	Version     string   // "" = not told
	MaxModelLen int      // of the first model; 0 = not told
	Ranks       []int    // numbers of the ranks behind the URL, ascending; none = not told
	// requests name a rank by its place in Ranks, not by its number
	CountsFromZero bool
}

// Probe asks the engine at url for its models and version; the deadline is ctx's. Errors are
// problem.Unavailable with a hint for the person who typed the URL. access nil means an engine without a key.
func Probe(ctx context.Context, url string, access engine.Credentials) (Found, error) {
	rt := engine.NewTransport()
	defer rt.CloseIdleConnections()
	c := engine.NewClient(url, engine.Addressing{}, access, rt)
	models, err := c.Models(ctx)
	if err != nil {
		return Found{}, explain(url, err)
	}
	f := Found{URL: url, MaxModelLen: models[0].MaxModelLen, Models: baseModels(models)}
	if len(f.Models) == 0 {
		return Found{}, problem.New(problem.Unavailable, "%s lists adapters alone, and no model", url).
			WithHint("start the engine with the adapters' base model; try: curl %s/v1/models", url)
	}
	f.Version, _ = c.Version(ctx) // not every engine has the route
	f.Family = family(models[0].OwnedBy, f.Version)
	if f.Family == VLLM {
		f.Ranks = rankNumbers(ctx, c)
		f.CountsFromZero = len(f.Ranks) > 1 && f.Ranks[0] > 0 && !takes(ctx, f.Models[0],
			engine.NewClient(url, addressed(f.Ranks[len(f.Ranks)-1]), access, rt))
	}
	return f, nil
}

// rankNumbers are the numbers of the ranks behind a URL. The event sources have them if the engine publishes
// KV events, the metrics in any case.
func rankNumbers(ctx context.Context, c *engine.Client) []int {
	if b, err := c.EventSources(ctx); err == nil {
		if sources, err := kvevents.ParseSources(b); err == nil && len(sources) > 0 {
			return slices.Sorted(maps.Keys(sources))
		}
	}
	numbers, _ := c.RankNumbers(ctx) // not every engine has the route
	return numbers
}

func addressed(number int) engine.Addressing {
	return engine.Addressing{Mode: app.AddressHeader, Selector: number}
}

// takes reports whether requests may name a rank by its number in the group, which c does. Of several front
// ends of one group, those written in Python count the ranks behind them from 0 and refuse higher numbers.
func takes(ctx context.Context, model string, c *engine.Client) bool {
	return c.Probe(ctx, model) == nil
}

// baseModels are the names of models that are no adapters. The ingress learns from the ranks which adapters
// they have.
func baseModels(models []engine.Model) (names []string) {
	for _, m := range models {
		if m.Parent == "" {
			names = append(names, m.ID)
		}
	}
	return names
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

// IsLate reports whether an error of Probe, or of resolving the engine's host, may be that of an engine which
// is being started: it may answer later.
func IsLate(err error) bool {
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return false
	}
	if status, ok := errors.AsType[*engine.StatusError](err); ok {
		return status.Status >= http.StatusInternalServerError
	}
	_, isNet := errors.AsType[net.Error](err)
	return isNet || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
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
		return problem.New(problem.Unavailable, "%s asks for an API key, or for another one", url).
			WithHint("put the key into an environment variable and name it: --engine-api-key-env NAME; " +
				"--api-key-env NAME of `bench` and `chat`")
	case errors.As(err, &status):
		return problem.New(problem.Unavailable, "%s is no OpenAI-compatible engine: %w", url, err).
			WithHint("the URL ends before /v1; try: curl %s/v1/models", url)
	}
	return problem.New(problem.Unavailable, "cannot probe %s: %w", url, err).
		WithHint("try: curl %s/v1/models", url)
}
