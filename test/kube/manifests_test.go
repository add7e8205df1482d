// Package kube_test checks the manifests of examples/kubernetes against the types of the Kubernetes API. It
// is a module of its own, so that dpserve does not depend on these: make test-kube.
package kube_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// TestManifestsHaveTheFieldsOfTheAPI: every document is of a known kind, and has no field that its type
// lacks. The selector of a workload matches its pods.
func TestManifestsHaveTheFieldsOfTheAPI(t *testing.T) {
	names, err := filepath.Glob("../../examples/kubernetes/*.yaml")
	if err != nil || len(names) == 0 {
		t.Fatal("no manifests", err)
	}
	seen := 0
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		docs := utilyaml.NewDocumentDecoder(io.NopCloser(bytes.NewReader(text)))
		for buffer := make([]byte, len(text)+1); ; seen++ {
			n, err := docs.Read(buffer)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(name, err)
			}
			check(t, name, buffer[:n])
		}
	}
	if seen < 10 {
		t.Errorf("only %d documents were read", seen)
	}
}

func check(t *testing.T, name string, doc []byte) {
	t.Helper()
	var head struct{ APIVersion, Kind string }
	if err := yaml.Unmarshal(doc, &head); err != nil {
		t.Fatal(name, err)
	}
	object := map[string]any{
		"v1 Service":                    &corev1.Service{},
		"apps/v1 StatefulSet":           &appsv1.StatefulSet{},
		"apps/v1 Deployment":            &appsv1.Deployment{},
		"policy/v1 PodDisruptionBudget": &policyv1.PodDisruptionBudget{},
	}[head.APIVersion+" "+head.Kind]
	if object == nil {
		t.Errorf("%s: unknown kind %q %q", name, head.APIVersion, head.Kind)
		return
	}
	if err := yaml.UnmarshalStrict(doc, object); err != nil {
		t.Errorf("%s: %s: %v", name, head.Kind, err)
	}
	switch o := object.(type) {
	case *appsv1.StatefulSet:
		matches(t, o.Name, o.Spec.Selector.MatchLabels, o.Spec.Template.Labels)
	case *appsv1.Deployment:
		matches(t, o.Name, o.Spec.Selector.MatchLabels, o.Spec.Template.Labels)
	}
}

func matches(t *testing.T, name string, wanted, labels map[string]string) {
	t.Helper()
	for key, value := range wanted {
		if labels[key] != value {
			t.Errorf("%s: its selector wants %s=%s, its pods have %q", name, key, value, labels[key])
		}
	}
}
