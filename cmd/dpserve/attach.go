package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/attach"
	"github.com/dpserve/dpserve/internal/problem"
)

// Bounds of probing the engines of --attach.
const (
	probeTimeout = 10 * time.Second
	probesAtOnce = 8
)

// attachFile probes running engines and writes an app.yaml that puts one endpoint in front of them. All
// engines must serve the first engine's model; other names that all of them serve become aliases. note says
// what else the engines tell of themselves; "" = nothing.
func attachFile(ctx context.Context, urls []string, with app.Engine) (text []byte, note string, err error) {
	engines := make([]string, len(urls))
	for i, u := range urls {
		if engines[i], err = engineURL("up", "--attach", u); err != nil {
			return nil, "", err
		}
	}
	found, err := probeAll(ctx, engines, with)
	if err != nil {
		return nil, "", err
	}
	names, err := commonModels(found)
	if err != nil {
		return nil, "", err
	}
	family := commonFamily(found)
	layout := attach.Arrange(family, found)
	return writeAttach(family, names, &layout, &with), layout.Note, nil
}

// commonFamily is the family of the engines. Engines of several families share only the API.
func commonFamily(found []attach.Found) string {
	for _, f := range found {
		if f.Family != found[0].Family {
			return attach.OpenAI
		}
	}
	return found[0].Family
}

// engineURL checks a URL of the command line and returns it as scheme://host:port, with the path that the
// engine's routes begin with. It accepts a trailing /v1, because OpenAI clients use such base URLs.
func engineURL(cmd, what, text string) (string, error) {
	s := strings.TrimSuffix(strings.TrimSuffix(strings.TrimRight(strings.TrimSpace(text), "/"), "/v1"), "/")
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" ||
		u.RawQuery != "" || u.User != nil {
		return "", usageError(cmd, "%s %q: wanted http://HOST:PORT", what, text)
	}
	return s, nil
}

func probeAll(ctx context.Context, urls []string, with app.Engine) ([]attach.Found, error) {
	access, err := engine.AccessTo(&app.Application{Engine: with})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	found := make([]attach.Found, len(urls))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(probesAtOnce)
	for i, u := range urls {
		g.Go(func() (err error) {
			found[i], err = attach.Probe(ctx, u, access)
			return err
		})
	}
	return found, g.Wait()
}

// commonModels returns the model names that every engine serves, in the first engine's order. The first name
// is the model's id.
func commonModels(found []attach.Found) ([]string, error) {
	var out []string
	for _, m := range found[0].Models {
		if !slices.ContainsFunc(found, func(f attach.Found) bool { return !slices.Contains(f.Models, m) }) {
			out = append(out, m)
		}
	}
	if len(out) > 0 {
		return out, nil
	}
	err := problem.New(problem.InvalidArgument, "the engines serve different models")
	for _, f := range found {
		err.Details = append(err.Details, f.URL+" serves "+strings.Join(f.Models, ", "))
	}
	return nil, err.WithHint(
		"attach engines of one model, or write an app.yaml with one application per model")
}

// writeAttach writes the shortest app.yaml for the engines.
func writeAttach(family string, models []string, layout *attach.Layout, with *app.Engine) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "applications:\n  - name: %s\n    model:\n      id: %s\n",
		nameOf(models[0], "attached"), quoteString(models[0]))
	if len(models) > 1 {
		b.WriteString("      aliases:\n")
		for _, m := range models[1:] {
			fmt.Fprintf(&b, "        - %s\n", quoteString(m))
		}
	}
	if layout.IsLockstep {
		fmt.Fprintf(&b, "    data_parallel:\n      dp_size: %d\n      coupling: %s\n", len(layout.Ranks),
			app.Lockstep)
	}
	fmt.Fprintf(&b, "    engine:\n      kind: %s\n      family: %s\n", app.KindAttach, family)
	if with.APIKeyEnv != "" {
		fmt.Fprintf(&b, "      api_key_env: %s\n", quoteString(with.APIKeyEnv))
	}
	if with.APIKeyFile != "" {
		fmt.Fprintf(&b, "      api_key_file: %s\n", quoteString(with.APIKeyFile))
	}
	if with.TLS != nil {
		fmt.Fprintf(&b, "      tls:\n        ca: %s\n", quoteString(with.TLS.CA))
	}
	b.WriteString("      ranks:\n")
	for _, r := range layout.Ranks {
		fmt.Fprintf(&b, "        - url: %s\n", quoteString(r.URL))
		if r.Selector >= 0 {
			fmt.Fprintf(&b, "          addressing: %s\n          selector: %d\n", app.AddressHeader,
				r.Selector)
		}
	}
	return []byte(b.String())
}

// quoteString returns a YAML string; a JSON string is one.
func quoteString(s string) string {
	text, _ := json.Marshal(s) // a string always marshals
	return string(text)
}

// nameOf makes the name of an application from the last part of a model's id. prefix comes before a name that
// would begin with a digit, or be empty.
func nameOf(model, prefix string) string {
	model = strings.TrimRight(model, "/")
	return app.Label(model[strings.LastIndexByte(model, '/')+1:], prefix)
}
