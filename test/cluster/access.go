package cluster

import (
	"context"
	"fmt"
	"os"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Config returns how the administrator reaches the API server. The caller may change it.
func (c *Cluster) Config() *rest.Config { return rest.CopyConfig(c.admin) }

// ConfigFor returns how a user of that name in those groups reaches the API server. RBAC binds only the system's own
// users and groups, such as "system:node:gpu-1" of "system:nodes".
func (c *Cluster) ConfigFor(user string, groups ...string) (*rest.Config, error) {
	pair, err := c.authority.issue(userSubject(user, groups))
	if err != nil {
		return nil, err
	}
	config := c.anonymous()
	config.CertData, config.KeyData = pair.cert, pair.key
	return config, nil
}

// ServiceAccountConfig returns how a program with a token of an existing service account reaches the API server, for
// one hour. Like one of kubectl create token, the token is bound to nothing: it names neither pod nor node.
func (c *Cluster) ServiceAccountConfig(ctx context.Context, namespace, name string) (*rest.Config, error) {
	return c.tokenConfig(ctx, namespace, name, nil)
}

// PodConfig returns how a pod of an existing service account reaches the API server. The token is like one that kubelet
// gets: it names the pod and its node. It is valid for one hour, as long as the pod exists. The pod must have been
// given a node.
func (c *Cluster) PodConfig(ctx context.Context, pod *corev1.Pod) (*rest.Config, error) {
	return c.tokenConfig(ctx, pod.Namespace, pod.Spec.ServiceAccountName, &authenticationv1.BoundObjectReference{
		Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID,
	})
}

// NodeConfig returns how a program outside pods reaches the API server from a node, with an existing service account.
// The token names the node. It is valid for one hour, as long as the node exists.
func (c *Cluster) NodeConfig(ctx context.Context, namespace, name, node string) (*rest.Config, error) {
	return c.tokenConfig(ctx, namespace, name, &authenticationv1.BoundObjectReference{Kind: "Node", APIVersion: "v1", Name: node})
}

func (c *Cluster) tokenConfig(ctx context.Context, namespace, name string, bound *authenticationv1.BoundObjectReference) (*rest.Config, error) {
	client, err := kubernetes.NewForConfig(c.admin)
	if err != nil {
		return nil, fmt.Errorf("making a client for the API server: %w", err)
	}
	request, err := client.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, name, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: bound},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("requesting a token of service account %s/%s: %w", namespace, name, err)
	}
	config := c.anonymous()
	config.BearerToken = request.Status.Token
	return config, nil
}

// anonymous is a config without credentials and without a limit on its requests.
func (c *Cluster) anonymous() *rest.Config {
	return &rest.Config{
		Host:            fmt.Sprintf("https://127.0.0.1:%d", c.port),
		TLSClientConfig: rest.TLSClientConfig{CAData: c.authority.cert},
		QPS:             -1,
	}
}

// AdminKubeconfig is the path of the administrator's kubeconfig.
func (c *Cluster) AdminKubeconfig() string { return c.kubeconfigOf("admin") }

// WriteKubeconfig writes a config of this package as a kubeconfig, for programs.
func WriteKubeconfig(path string, config *rest.Config) error {
	const name = "gpuslice"
	kubeconfig := clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{name: {
			Server:                   config.Host,
			CertificateAuthorityData: config.CAData,
		}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{name: {
			ClientCertificateData: config.CertData,
			ClientKeyData:         config.KeyData,
			Token:                 config.BearerToken,
		}},
		Contexts:       map[string]*clientcmdapi.Context{name: {Cluster: name, AuthInfo: name}},
		CurrentContext: name,
	}
	if err := clientcmd.WriteToFile(kubeconfig, path); err != nil {
		return fmt.Errorf("writing kubeconfig %s: %w", path, err)
	}
	return nil
}

func writeFile(path string, content []byte) error {
	if err := os.WriteFile(path, content, 0o600); err != nil {
		return fmt.Errorf("writing a file of the control plane: %w", err)
	}
	return nil
}
