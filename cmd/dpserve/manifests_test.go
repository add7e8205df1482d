package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// manifestValues stand for what Kubernetes writes into the command lines of the manifests.
var manifestValues = strings.NewReplacer("$(TOKEN)", "dpj1.AAAA", "$(POD_IP)", "10.0.0.7",
	"$(POD_NAME)", "dpserve-0", "$(NAMESPACE)", "default")

// FS20: every command line of dpserve in the manifests for Kubernetes and in the compose file names a
// command, flags and values that exist, and every mount has its volume.
func TestManifestsCallCommandsThatExist(t *testing.T) {
	lines := map[string]bool{}
	visit := func(name string, c map[string]any) {
		words := append(textsIn(c["command"]), textsIn(c["args"])...)
		require.NotEmpty(t, words, name)
		if words[0] != "/dpserve" {
			words = append([]string{"dpserve"}, words...)
		}
		line := manifestValues.Replace(strings.Join(words, " "))
		require.NoError(t, parseCommandLine(t, line), "%s: %s", name, line)
		assert.NotContains(t, line, "$(", "%s: Kubernetes replaces variables that env sets", name)
		lines[words[1]] = true
	}
	names, err := filepath.Glob(filepath.Join(repository, "examples/kubernetes/*.yaml"))
	require.NoError(t, err)
	for _, name := range names {
		for _, doc := range documents(t, name) {
			for _, c := range containersOf(doc) {
				visit(name, c)
				if stop, ok := dig(c, "lifecycle", "preStop", "exec").(map[string]any); ok {
					visit(name, stop)
				}
				assertMounts(t, name, doc, c)
			}
		}
	}
	compose := filepath.Join(repository, "examples/compose/compose.yaml")
	service, ok := dig(documents(t, compose)[0], "services", "dpserve").(map[string]any)
	require.True(t, ok)
	visit(compose, service)
	for _, command := range []string{"start", "join", "leave", "up"} {
		assert.True(t, lines[command], "%s is called", command)
	}
}

// assertMounts: each mount of a container has its volume, and each variable of its command line is set.
func assertMounts(t *testing.T, name string, doc, c map[string]any) {
	t.Helper()
	var volumes, variables []string
	for _, path := range [][]string{
		{"spec", "template", "spec", "volumes"}, {"spec", "volumeClaimTemplates"},
	} {
		for _, v := range mapsIn(dig(doc, path...)) {
			volume, _ := v["name"].(string)
			if volume == "" {
				volume, _ = dig(v, "metadata", "name").(string)
			}
			volumes = append(volumes, volume)
		}
	}
	for _, m := range mapsIn(c["volumeMounts"]) {
		assert.Contains(t, volumes, m["name"], name)
	}
	for _, v := range mapsIn(c["env"]) {
		variable, _ := v["name"].(string)
		variables = append(variables, variable)
	}
	for _, word := range textsIn(c["args"]) {
		for part := range strings.SplitSeq(word, "$(") {
			variable, _, isOne := strings.Cut(part, ")")
			assert.True(t, !isOne || slices.Contains(variables, variable), "%s: %s", name, word)
		}
	}
}

// documents reads the documents of a YAML file.
func documents(t *testing.T, name string) (out []map[string]any) {
	t.Helper()
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	for d := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var doc map[string]any
		if err := d.Decode(&doc); errors.Is(err, io.EOF) {
			require.NotEmpty(t, out, name)
			return out
		} else if err != nil {
			require.NoError(t, err, name)
		}
		out = append(out, doc)
	}
}

// containersOf returns the containers of dpserve in a manifest.
func containersOf(doc map[string]any) (out []map[string]any) {
	for _, c := range mapsIn(dig(doc, "spec", "template", "spec", "containers")) {
		if c["name"] == "dpserve" {
			out = append(out, c)
		}
	}
	return out
}

// dig returns the value at a path of keys, nil if it is not there.
func dig(v any, path ...string) any {
	for _, key := range path {
		m, _ := v.(map[string]any)
		v = m[key]
	}
	return v
}

func mapsIn(v any) (out []map[string]any) {
	list, _ := v.([]any)
	for _, item := range list {
		if m, ok := item.(map[string]any); ok {
			out = append(out, m)
		}
	}
	return out
}

func textsIn(v any) (out []string) {
	list, _ := v.([]any)
	for _, item := range list {
		if s, ok := item.(string); ok {
			out = append(out, s)
		}
	}
	return out
}
