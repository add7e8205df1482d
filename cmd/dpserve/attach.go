package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine/attach"
	"github.com/dpserve/dpserve/internal/problem"
)

// attachFlags say which running engines up puts its endpoint in front of, and how they are reached.
type attachFlags struct {
	attach          []string
	prefill, decode []string
	access          app.Engine // the key and the CA
	ca              string     // of access
	wait            time.Duration
}

func (f *attachFlags) add(flags *pflag.FlagSet) {
	flags.StringSliceVar(&f.attach, "attach", nil,
		"`URL`s of engines that already run, instead of FILE: http://HOST:PORT or HOST:PORT; "+
			"dns://HOST:PORT stands for all addresses of HOST, which may change")
	flags.DurationVar(&f.wait, "attach-wait", deployTimeout,
		"how long to wait for engines that do not answer yet; then exit code 8")
	flags.StringArrayVar(&f.prefill, "prefill", nil, "`URL` of an engine that only computes prompts, with "+
		"its bootstrap port if its transfer has one: URL or URL,PORT; repeatable")
	flags.StringArrayVar(&f.decode, "decode", nil, "`URL` of an engine that answers; repeatable")
	flags.StringVar(&f.access.APIKeyEnv, "engine-api-key-env", "",
		"environment `variable` with the API key that the engines of --attach ask for")
	flags.StringVar(&f.access.APIKeyFile, "engine-api-key-file", "", "`file` with that key instead")
	flags.StringVar(&f.ca, "engine-ca", "", "`file` with the CA of engines of --attach over https")
}

// isAttach reports whether the command line names engines.
func (f *attachFlags) isAttach() bool { return len(f.attach) > 0 || f.hasRoles() }

func (f *attachFlags) hasRoles() bool { return len(f.prefill) > 0 || len(f.decode) > 0 }

// noBootstrap stands for the port of an engine that has none.
const noBootstrap = "none"

// attached is an engine of the command line.
type attached struct {
	url, role, bootstrap string
}

// list returns the engines of the command line.
func (f *attachFlags) list() ([]attached, error) {
	var out []attached
	for _, side := range []struct {
		flag, role string
		texts      []string
	}{
		{"--attach", "", f.attach},
		{"--prefill", app.RolePrefill, f.prefill},
		{"--decode", app.RoleDecode, f.decode},
	} {
		for _, text := range side.texts {
			text, port, hasPort := strings.Cut(text, ",")
			for _, word := range strings.Fields(text) {
				u, err := attachURL("up", side.flag, word)
				if err != nil {
					return nil, err
				}
				engine := attached{url: u, role: side.role}
				at, _ := url.Parse(u)
				switch {
				case !hasPort || strings.EqualFold(port, noBootstrap):
				case app.IsServiceURL(u):
					return nil, usageError("up", "%s %q: engines of a service have no bootstrap port here",
						side.flag, text)
				default:
					engine.bootstrap = "http://" + net.JoinHostPort(at.Hostname(), port)
				}
				out = append(out, engine)
			}
		}
	}
	if len(out) == 0 {
		return nil, usageError("up", "--attach wants URL[,URL...]")
	}
	return out, nil
}

// prober says what the engines at urls are. with has their key and CA.
type prober func(urls []string, with app.Engine) ([]attach.Found, error)

// attachFile writes an app.yaml that puts one endpoint in front of running engines. All of them must serve
// the first engine's model; other names that all of them serve become aliases. note says what else the
// engines tell of themselves; "" = nothing.
func attachFile(f *attachFlags, probe prober) (text []byte, note string, err error) {
	engines, err := f.list()
	if err != nil {
		return nil, "", err
	}
	with := f.access
	if f.ca != "" {
		with.TLS = &app.EngineTLS{CA: f.ca}
	}
	var urls []string
	for _, one := range engines {
		urls = append(urls, one.url)
	}
	found, err := probe(urls, with)
	if err != nil {
		return nil, "", err
	}
	names, err := commonModels(found)
	if err != nil {
		return nil, "", err
	}
	family := commonFamily(found)
	layout := attach.Arrange(family, found)
	return writeAttach(family, names, &layout, engines, &with), layout.Note, nil
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

// attachURL checks a URL of the command line, of an engine or of a service.
func attachURL(cmd, what, text string) (string, error) {
	if !app.IsServiceURL(text) {
		return engineURL(cmd, what, text)
	}
	u, err := url.Parse(text)
	if err != nil || u.Port() == "" || u.Hostname() == "" || u.RawQuery != "" || u.User != nil {
		return "", usageError(cmd, "%s %q: wanted dns://HOST:PORT or dns+https://HOST:PORT", what, text)
	}
	return strings.TrimSuffix(strings.TrimRight(text, "/"), "/v1"), nil
}

// engineURL checks a URL of the command line and returns it as scheme://host:port, with the path that the
// engine's routes begin with. It accepts a trailing /v1, because OpenAI clients use such base URLs.
func engineURL(cmd, what, text string) (string, error) {
	s := strings.TrimSuffix(strings.TrimSuffix(strings.TrimRight(strings.TrimSpace(text), "/"), "/v1"), "/")
	if _, _, err := net.SplitHostPort(s); err == nil && !strings.Contains(s, "/") {
		s = "http://" + s
	}
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" ||
		u.RawQuery != "" || u.User != nil {
		return "", usageError(cmd, "%s %q: wanted HOST:PORT or http://HOST:PORT", what, text)
	}
	return s, nil
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
func writeAttach(family string, models []string, layout *attach.Layout, engines []attached, with *app.Engine,
) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "applications:\n  - name: %s\n    model:\n      id: %s\n",
		nameOf(models[0], "attached"), quoteString(models[0]))
	if len(models) > 1 {
		b.WriteString("      aliases:\n")
		for _, m := range models[1:] {
			fmt.Fprintf(&b, "        - %s\n", quoteString(m))
		}
	}
	hasRoles := slices.ContainsFunc(engines, func(e attached) bool { return e.role != "" })
	if layout.IsLockstep && !hasRoles {
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
	list := ""
	ranks := slices.Clone(layout.Ranks)
	slices.SortStableFunc(ranks, func(a, b attach.Rank) int { return strings.Compare(listOf(a), listOf(b)) })
	for _, r := range ranks {
		if listOf(r) != list {
			list = listOf(r)
			fmt.Fprintf(&b, "      %s:\n", list)
		}
		fmt.Fprintf(&b, "        - url: %s\n", quoteString(r.URL))
		if r.Selector >= 0 {
			fmt.Fprintf(&b, "          addressing: %s\n          selector: %d\n", app.AddressHeader,
				r.Selector)
		}
		e := engines[slices.IndexFunc(engines, func(e attached) bool { return e.url == r.URL })]
		if e.role != "" {
			fmt.Fprintf(&b, "          role: %s\n", e.role)
		}
		if e.bootstrap != "" {
			fmt.Fprintf(&b, "          pd:\n            bootstrap: %s\n", quoteString(e.bootstrap))
		}
	}
	return []byte(b.String())
}

// listOf is the key of the list that a rank stands in.
func listOf(r attach.Rank) string {
	if app.IsServiceURL(r.URL) {
		return "services"
	}
	return "ranks"
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
